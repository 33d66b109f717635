"""What macOS is told of the application: its identity, and that it can open models. Data for `Info.plist`.

GGUF is nobody's type on macOS, so the bundle imports a declaration for it rather than exporting one: should its makers
declare it some day, theirs wins. `Alternate` never takes a file from the program that people chose.
"""

from __future__ import annotations

IDENTIFIER = "io.github.layerdeck.layerdeck"
MODEL_TYPE = "org.ggml.gguf"
INFO: dict[str, object] = {
    "CFBundleDisplayName": "Layerdeck",
    "CFBundleName": "Layerdeck",
    "LSApplicationCategoryType": "public.app-category.developer-tools",
    "LSMinimumSystemVersion": "12.0",
    "NSHighResolutionCapable": True,
    "NSLocalNetworkUsageDescription": "Layerdeck speaks to the workers on other computers that you add.",
    "CFBundleDocumentTypes": [
        {
            "CFBundleTypeName": "GGUF language model",
            "CFBundleTypeRole": "Viewer",
            "LSHandlerRank": "Alternate",
            "LSItemContentTypes": [MODEL_TYPE],
        }
    ],
    "UTImportedTypeDeclarations": [
        {
            "UTTypeIdentifier": MODEL_TYPE,
            "UTTypeDescription": "GGUF language model",
            "UTTypeConformsTo": ["public.data"],
            "UTTypeTagSpecification": {
                "public.filename-extension": ["gguf"],
                "public.mime-type": ["application/x-gguf"],
            },
        }
    ],
}
