"""From the formula of a cell, as a Python function or as C++ text, to its C++ struct."""
