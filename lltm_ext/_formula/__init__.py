"""Turns the formula of a cell, a Python function or C++ text, into its C++ struct."""
