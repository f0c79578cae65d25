"""Mutation testing: changes the cores one operator at a time and asks whether a test notices."""
