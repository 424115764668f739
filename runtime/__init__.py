"""The runtime: transports, the executor of programs, DTensor, MoE, integrations and tracing."""

from .logs import set_up_logs

set_up_logs()
