"""Weight sync: complete, verified weights from a train engine's ranks to those who serve or follow them."""
