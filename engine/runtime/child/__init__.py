"""The model child, the process that runs llama.cpp. Only this package imports llama_cpp."""
