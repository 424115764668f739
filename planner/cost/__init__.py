"""What a step or a program costs, in bytes and in microseconds."""
