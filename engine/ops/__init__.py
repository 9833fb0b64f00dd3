"""Operators of the model, one interface (`backend.Operators`) for each kind of device."""
