"""What the workers of a load or of a lost child answered to our hello, by endpoint."""

from __future__ import annotations

from collections.abc import Mapping

from engine.devices.endpoint import Greeting

Greetings = Mapping[str, Greeting]
