"""What the documentation shows of the code: a page per component, every error sentence, and Markdown made fit for the site."""
