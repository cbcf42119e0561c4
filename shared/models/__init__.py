"""Model code.  One module covers the Llama family: Llama, Qwen2, Qwen3 and Mistral."""
