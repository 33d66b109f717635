"""One open model: a pure state machine, a driver that carries out its effects, and a snapshot for all readers."""
