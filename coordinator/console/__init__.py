"""The coordinator console: pages for operators, researchers, compliance officers and auditors."""
