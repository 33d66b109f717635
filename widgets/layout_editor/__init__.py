"""The layout editor: layers and weights are placed on devices by mouse and keyboard."""
