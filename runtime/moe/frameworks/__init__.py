"""TokenDispatcher in Megatron-core, vLLM and Hugging Face Transformers. Each module imports its framework itself, if it
is installed; nothing else in the package imports these modules."""
