"""An import contract that import-linter does not provide: pure packages, which import only the standard library."""

import sys

import grimp
from importlinter import Contract, ContractCheck, fields, output


class PureContract(Contract):
    """Require that modules import only the standard library, one another and explicitly allowed packages.

    Configuration options:
        - pure_modules: the packages to check, with all modules below them.
        - allowed: other packages that they may import.
    """

    type_name = "pure"

    pure_modules = fields.ListField(subfield=fields.ModuleField())
    allowed = fields.ListField(subfield=fields.ModuleField(), required=False)

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        """Find every import that is not allowed."""
        broken = []
        for package in (module.name for module in self.pure_modules):
            permitted = [package, *(module.name for module in self.allowed or ())]
            for module in sorted({package, *graph.find_descendants(package)}):
                broken += [
                    f"{module} -> {imported}"
                    for imported in sorted(graph.find_modules_directly_imported_by(module))
                    if imported.split(".")[0] not in sys.stdlib_module_names
                    and not any(imported == name or imported.startswith(f"{name}.") for name in permitted)
                ]
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the forbidden imports."""
        for line in check.metadata["broken"]:
            output.print_error(line)
        output.new_line()
