"""How measurements are made, stored, compared and shown."""
