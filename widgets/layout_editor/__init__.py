"""The layout editor: which layer goes to which device, by mouse and keyboard."""
