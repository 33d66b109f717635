"""llama.cpp as the child sees it: C functions, devices, the log, memory breakdowns, failures."""
