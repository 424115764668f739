"""torch's TokenSwitch on token dispatchers."""
