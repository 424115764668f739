"""A program as text, as a drawing, as JSON and back."""
