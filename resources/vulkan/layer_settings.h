// What ggml-vulkan.cpp uses of VK_EXT_layer_settings, for Vulkan headers that are older than that extension (1.3.272):
// Debian 12 has 1.3.239. make.py has the compiler include this file first where it is needed, and nowhere else.
//
// The names are those of vulkan.hpp and stand by themselves, since ggml sets macros before it includes that one. Layout
// and numbers are those of VkLayerSettingEXT and VkLayerSettingsCreateInfoEXT of the Vulkan specification. The engine
// hands them to vkCreateInstance, and a loader that does not know the extension passes over them.
#pragma once

#include <cstdint>
#include <vector>

namespace vk {

enum class LayerSettingTypeEXT : std::int32_t {
    eBool32 = 0,
};

struct LayerSettingEXT {
    const char * pLayerName;
    const char * pSettingName;
    LayerSettingTypeEXT type;
    std::uint32_t valueCount;
    const void * pValues;
};

struct LayerSettingsCreateInfoEXT {
    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings)
        : settingCount(static_cast<std::uint32_t>(settings.size())), pSettings(settings.data()) {}

    std::int32_t sType = 1000496000;
    const void * pNext = nullptr;
    std::uint32_t settingCount;
    const LayerSettingEXT * pSettings;
};

}  // namespace vk
