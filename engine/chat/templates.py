"""Common chat templates for models whose file has no chat template or a wrong one."""

from __future__ import annotations

from collections.abc import Mapping

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else 'user' }}\n{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content }}"
    "{{ eos_token }}{% else %}[INST] {{ message.content | trim }} [/INST]{% endif %}{% endfor %}"
)
_VICUNA = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% elif message.role == 'user' %}USER: {{ message.content }}\n"
    "{% else %}ASSISTANT: {{ message.content }}{{ eos_token }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

TEMPLATES: Mapping[str, str] = {
    "ChatML": _CHATML,
    "Llama 3": _LLAMA_3,
    "Gemma": _GEMMA,
    "Mistral": _MISTRAL,
    "Vicuna": _VICUNA,
}
"""Templates by their names in the settings panel."""
