"""How parameters move: groups by role, schedules in closed form, clipping, one exact global norm."""
