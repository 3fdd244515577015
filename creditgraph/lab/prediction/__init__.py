"""Whether scores of credit foretell what training gains."""
