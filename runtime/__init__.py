"""The runtime: transports, the executor of programs, DTensor, MoE, integrations and tracing."""
