"""The executor: a program is lowered to a transport, bound to tensors, and run."""
