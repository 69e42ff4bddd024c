"""The stores' conformance suite, small segments and a faulty network, for tests of this package and of other stores."""
