"""Transfers of tokens between ranks: by pushes, by messages of exact or fixed size, or through symmetric buffers."""
