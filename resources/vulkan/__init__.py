"""What an engine with the Vulkan backend is built with."""
