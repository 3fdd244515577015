"""Whether scores of credit predict what training gains."""
