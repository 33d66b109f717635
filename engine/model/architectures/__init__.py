"""What llama.cpp decides by a model's architecture in code: one record per name, nothing that a file's header says."""
