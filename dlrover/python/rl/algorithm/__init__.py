"""Advantages, losses and KL estimators. An algorithm annotates rows, an engine runs its loss; one small file each."""
