"""Reports: tables, figures, model cards and one HTML page from the folders of runs and benches."""
