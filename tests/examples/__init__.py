"""Tests of the examples that need no engine."""
