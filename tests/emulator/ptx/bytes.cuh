#pragma once

inline int add_products_of_bytes(int sum, unsigned a, unsigned b) {
    for (int bits = 0; bits < 32; bits += 8)
        sum += static_cast<uint8_t>(a >> bits) * static_cast<int8_t>(b >> bits);
    return sum;
}
