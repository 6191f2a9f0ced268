"""Quality of selectors, measured on a model beside full attention, an oracle, random and recent rows."""
