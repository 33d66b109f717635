"""The model child, the process that runs llama.cpp. It is the only package that imports llama_cpp."""
