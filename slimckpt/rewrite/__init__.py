"""Moving bytes: plan, slim, restore, verify. Nothing here knows a format."""
