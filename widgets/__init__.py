"""Qt widgets and models. They show given values, and emit signals for the actions of the user."""
