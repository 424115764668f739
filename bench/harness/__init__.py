"""How measurements are made and shown."""
