"""How a rank starts and ends, and what the launcher says of it."""
