"""The fault matrix, which tests/distributed/test_fault_matrix.py runs; `make faults` has all."""
