"""Transports: how ranks synchronise and move bytes from one to another."""
