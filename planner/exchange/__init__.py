"""The exchange that changes one layout into another: which rank sends which box to which."""
