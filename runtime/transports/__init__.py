"""Transports: where ranks meet, and how bytes get from one to another."""
