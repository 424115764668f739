"""What users of DTensor call, and what takes the place of torch's own redistribution."""
