"""How measurements are made, kept, compared and shown."""
