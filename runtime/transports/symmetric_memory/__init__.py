"""Ranks that share symmetric memory and synchronise on the device."""
