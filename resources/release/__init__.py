"""What those who publish releases sign them with; nothing of it is in the bundle."""
