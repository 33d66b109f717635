"""Headers and checks for building the engine with Vulkan."""
