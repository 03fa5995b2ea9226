"""Settings of all tests."""

pytest_plugins = ["pytester"]
