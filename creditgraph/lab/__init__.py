"""What judges methods instead of training them: test beds, evidence, predictions, task families."""
