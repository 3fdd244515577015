"""The localisation study of a run: where its failures were reset, against where they went wrong."""
