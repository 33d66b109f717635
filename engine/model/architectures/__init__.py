"""Properties that llama.cpp decides by architecture in its code, one record per name; the file's header is read
elsewhere."""
