"""What builds, installs, loads and examines lltm_ext. All but selftest.py work without torch."""
